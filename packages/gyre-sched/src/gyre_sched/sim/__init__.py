"""A simulated cluster around the real scheduler: cost models, workloads, discrete events, a lower bound."""
