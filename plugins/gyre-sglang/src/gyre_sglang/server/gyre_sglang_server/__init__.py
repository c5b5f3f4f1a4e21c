"""The part of gyre-sglang that lives in SGLang's environment; imports nothing by itself."""
