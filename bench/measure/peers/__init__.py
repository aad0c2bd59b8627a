"""LitServe, Ray Serve and BentoML, each in an environment of its own; servers import none of ours."""
