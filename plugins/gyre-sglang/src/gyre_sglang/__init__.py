"""SGLang as an engine of Gyre."""
