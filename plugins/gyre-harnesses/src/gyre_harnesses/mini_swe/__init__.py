"""The harness `mini-swe`: the agent of the package mini-swe-agent, its commands run in our sandbox."""
