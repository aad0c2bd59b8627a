"""The number of files that this process may have open."""

import logging
import resource

log = logging.getLogger(__name__)

# More is of no use to one manager, and some systems allow a thousand million.
_MOST = 1 << 16


def raise_limit() -> int:
    """Raise the soft limit as far as the hard limit allows, and return the limit now in force.

    Connections and images in memory hold descriptors; the usual soft limit of 1024 is for programs
    that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _MOST if hard == unlimited else min(hard, _MOST)
    if soft != unlimited and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of open files stays at %d: %s", soft, error)
            return soft
        return wanted
    return _MOST if soft == unlimited else min(soft, _MOST)
