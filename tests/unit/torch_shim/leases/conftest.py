"""What tests of managers in a cluster share."""

from tests.kit.worlds.joined_manager import patient_streams

__all__ = ["patient_streams"]
