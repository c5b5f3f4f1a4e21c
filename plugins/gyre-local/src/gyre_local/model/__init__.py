"""Architecture, weights and forward pass of the models the embedded engine runs."""
