"""The HTTP dialects that agents speak, each a pure translation to and from `gyre_tito.requests`."""
