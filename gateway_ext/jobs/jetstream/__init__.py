"""The job queue that gateways share: NATS JetStream."""
