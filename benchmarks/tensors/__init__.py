"""What a request to a tensor model costs: over HTTP, over gRPC and in process, beside services written by hand."""
