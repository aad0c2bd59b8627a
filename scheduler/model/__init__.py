"""The scheduler's vocabulary: values, events, actions, errors, and what models cost. Pure."""
