"""What other programs say of themselves."""

import subprocess

_ANSWER_S = 10.0


def said_by(*command: str) -> str:
    """What a program prints; nothing where there is none, it fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
