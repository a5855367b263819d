"""The only place that touches SGLang's internals; everything else is plain Python."""
