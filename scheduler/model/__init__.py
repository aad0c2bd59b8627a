"""The scheduler's vocabulary: values, events, actions and errors. Pure."""
