"""Inference with tensor models: requests, backends and their instances, batches, versions; it knows no protocol."""
