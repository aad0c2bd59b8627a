"""The template: a process that has imported the handler, and of which instances are forks."""
