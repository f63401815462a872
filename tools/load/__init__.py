"""Load on a server of ours, for as long as one likes."""
