"""Where the interfaces of SGLang releases differ: one module per shape, which serves several releases."""
