"""The job queue that gateways share on NATS JetStream; nothing that SQLite's queue needs."""
