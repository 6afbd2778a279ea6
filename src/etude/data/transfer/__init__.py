"""Transfer: batches fetched ahead by a thread, and copied to the GPU on a stream of their own."""
