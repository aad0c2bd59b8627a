#!/usr/bin/env bash
# Installs what the tests use beside Python: engines, a browser. Installs on Debian as root alone;
# elsewhere it says what is missing, and the tests that need it are skipped by name (tests/kit/needs.py).
set -euo pipefail

# command:packages
TOOLS=(
  busybox:busybox-static
  'cc:gcc libc6-dev'
  chromium:chromium
  conntrack:conntrack
  containerd:containerd
  debootstrap:debootstrap
  docker-compose:docker-compose
  dockerd:docker.io
  go:golang
  ip:iproute2
  iptables:iptables
  nats-server:nats-server
  openssl:openssl
  prometheus:prometheus
  promtool:prometheus
  runc:runc
)

PATH="$PATH:/usr/sbin:/sbin"
missing=()
for tool in "${TOOLS[@]}"; do
  command -v "${tool%%:*}" >/dev/null || missing+=(${tool##*:})
done
[ -x /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
[ ${#missing[@]} -gt 0 ] || exit 0

if [ -n "${GPUFAAS_NO_INSTALL:-}" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "Not installed: ${missing[*]}. The tests that need them are skipped."
  exit 0
fi
echo "Installing what tests need: ${missing[*]} ..."
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # no service is started by its package
apt-get update --quiet --quiet
apt-get install --quiet --quiet --yes --no-install-recommends "${missing[@]}" >/dev/null
