"""An adapter package for a made-up SGLang release, and the code of that release (`engine.py`)."""
