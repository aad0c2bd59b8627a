"""From a request to a kept job, and which callback URLs are accepted; no job is run here."""
