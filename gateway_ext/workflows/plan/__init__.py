"""What a workflow is: its file, its stages, their conditions and inputs. Pure."""
