"""KServe's protocol (v2) as Triton speaks it: tensors on the wire, requests and answers over HTTP."""
