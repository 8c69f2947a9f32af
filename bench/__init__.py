"""Numbers that need other engines or a GPU; `hetero-infer bench` measures the product itself."""
