"""DeepSpeed as a trainer of Gyre."""
