"""Messages between processes, the bodies of requests, and errors: plain data that every part of the package shares."""
