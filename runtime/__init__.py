"""In-flight batching: walkers that run a step, caches, scheduler, engine and its socket."""
