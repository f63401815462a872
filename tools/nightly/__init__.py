"""What is too slow for every change: `make nightly`. Each part's last result is kept in `results/`, and committed."""
