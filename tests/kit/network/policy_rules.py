"""What NetworkPolicies let through between pods, as Kubernetes defines it.

For networks that enforce none: each pair of pods can be asked about.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]


class Policies:
    """All policies of a cluster, whose namespaces are given by name with their labels."""

    def __init__(self, policies: Sequence[Json], namespaces: Mapping[str, Json]) -> None:
        self._policies = policies
        self._namespaces = namespaces

    def let_through(self, source: Json, target: Json, port: int, protocol: str = "TCP") -> bool:
        """Whether one pod reaches a port of another one: both sides' policies must allow it."""
        return self._allowed("Egress", source, target, target, port, protocol) and self._allowed(
            "Ingress", target, source, target, port, protocol
        )

    def _allowed(
        self, way: str, own: Json, peer: Json, target: Json, port: int, protocol: str
    ) -> bool:
        """A pod that no policy of this way selects is open; else one rule is enough."""
        selecting = [one for one in self._policies if way in _ways(one) and _selects(one, own)]
        if not selecting:
            return True
        rules, peers = ("egress", "to") if way == "Egress" else ("ingress", "from")
        return any(
            self._is_among(peer, rule.get(peers), policy["metadata"]["namespace"])
            and _is_port(target, port, protocol, rule.get("ports"))
            for policy in selecting
            for rule in policy["spec"].get(rules) or []
        )

    def _is_among(self, pod: Json, peers: Sequence[Json] | None, namespace: str) -> bool:
        """No list of peers is everybody."""
        return not peers or any(self._is_peer(pod, peer, namespace) for peer in peers)

    def _is_peer(self, pod: Json, peer: Json, namespace: str) -> bool:
        if "ipBlock" in peer:
            return _in_block(pod["status"]["podIP"], peer["ipBlock"])
        theirs = pod["metadata"]["namespace"]
        if "namespaceSelector" in peer:
            labels = {"kubernetes.io/metadata.name": theirs}
            labels |= self._namespaces.get(theirs, {}).get("metadata", {}).get("labels") or {}
            if not matches(peer["namespaceSelector"], labels):
                return False
        elif theirs != namespace:
            return False
        return matches(peer.get("podSelector", {}), pod["metadata"].get("labels") or {})


def matches(selector: Json, labels: Mapping[str, str]) -> bool:
    """Whether labels are chosen by a selector; an empty one chooses all."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(each, labels) for each in selector.get("matchExpressions") or []
    )


def _holds(expression: Json, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case unknown:
            raise AssertionError(f"no operator of Kubernetes: {unknown}")


def _ways(policy: Json) -> Sequence[str]:
    spec = policy["spec"]
    usual = ["Ingress", "Egress"] if "egress" in spec else ["Ingress"]
    found: Sequence[str] = spec.get("policyTypes") or usual
    return found


def _selects(policy: Json, pod: Json) -> bool:
    same = policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
    labels = pod["metadata"].get("labels") or {}
    return same and matches(policy["spec"].get("podSelector", {}), labels)


def _is_port(target: Json, port: int, protocol: str, ports: Sequence[Json] | None) -> bool:
    """No list of ports is all of them; a name is that of a container's port."""
    if not ports:
        return True
    named = {
        each["name"]: each["containerPort"]
        for container in target["spec"]["containers"]
        for each in container.get("ports") or []
        if "name" in each
    }
    for each in ports:
        if each.get("protocol", "TCP") != protocol:
            continue
        first = each.get("port", port)
        number: int = named.get(first, 0) if isinstance(first, str) else first
        if number <= port <= each.get("endPort", number):
            return True
    return False


def _in_block(address: str, block: Json) -> bool:
    own = ipaddress.ip_address(address)
    outside = block.get("except") or []
    return own in ipaddress.ip_network(block["cidr"]) and not any(
        own in ipaddress.ip_network(each) for each in outside
    )
