"""Tree batches and losses that compute a shared prefix once."""
