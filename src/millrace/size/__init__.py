"""From a business question to the systems to buy."""
