"""Everything that depends on the insides of SGLang, behind `sglang_april.scheduler.engine.Engine`."""
