"""Everything that depends on the insides of SGLang 0.5.17, behind `sglang_april.scheduler.engine.Engine`."""
