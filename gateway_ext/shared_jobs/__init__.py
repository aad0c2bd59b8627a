"""What gateways share on NATS JetStream: the queue of jobs, and texts."""
