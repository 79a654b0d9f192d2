"""Values of a model's parameters and buffers: first values, random numbers, copies and digests."""
