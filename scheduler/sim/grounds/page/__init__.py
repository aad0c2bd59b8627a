"""The generated parts of docs/evaluation/gain.md."""
