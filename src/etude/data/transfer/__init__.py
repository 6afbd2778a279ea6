"""Transfer: batches prefetched by a thread, and copied to the GPU on a side stream."""
