"""A model repository as Triton's users have it: config.pbtxt, versions, labels; read, checked and explained."""
