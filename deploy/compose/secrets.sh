#!/bin/sh
# Makes what the parts of docker-compose.yml let each other in by, once, in deploy/compose/secrets:
#
#   sudo deploy/compose/secrets.sh          # does nothing where everything is there
#   sudo deploy/compose/secrets.sh --node   # on a further GPU host, where cluster-secret was copied to
#                                           # that folder first: what its manager needs beside it
#
# Every file belongs to the one user who reads it, with mode 400: 10000, our images' user, or root
# where a container's root has no right to read what is others'. To renew one, remove it, run
# this again, then docker-compose up -d --force-recreate. Needs openssl, and root for the owners.
set -eu
umask 077

HERE=$(cd "$(dirname "$0")" && pwd)
SECRETS=${GPUFAAS_SECRETS:-$HERE/secrets}
OURS=10000 # as in deploy/docker/*.Dockerfile
GRAFANA=472
DAYS=3650

die() {
  echo "secrets.sh: $*" >&2
  exit 1
}

[ "$(id -u)" = 0 ] || die "run it as root: files are given to the users of containers"
command -v openssl >/dev/null || die "openssl is missing: apt-get install openssl"

# keep NAME OWNER: standard input becomes the file, unless it is there
keep() {
  if [ -s "$SECRETS/$1" ]; then
    cat >/dev/null
    return
  fi
  cat >"$SECRETS/.$1"
  [ -s "$SECRETS/.$1" ] || die "$1 would be empty"
  chown "$2" "$SECRETS/.$1"
  chmod 400 "$SECRETS/.$1"
  mv "$SECRETS/.$1" "$SECRETS/$1"
  echo "made $SECRETS/$1"
}

random() {
  openssl rand -hex 24
}

authority() {
  [ -s "$SECRETS/ca.pem" ] && [ -s "$SECRETS/ca-key.pem" ] && return
  # What another authority signed is of no use beside a new one.
  rm -f "$SECRETS"/ca.pem "$SECRETS"/ca-key.pem "$SECRETS"/etcd*.pem "$SECRETS"/scheduler*.pem
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days $DAYS \
    -subj "/CN=gpufaas" -keyout "$WORK/ca-key.pem" -out "$WORK/ca.pem" 2>"$WORK/said" ||
    die "openssl: $(cat "$WORK/said")"
  keep ca.pem 0 <"$WORK/ca.pem"
  keep ca-key.pem 0 <"$WORK/ca-key.pem"
  chmod 444 "$SECRETS/ca.pem" # a certificate is no secret, and several users read this one
}

# certificate NAME OWNER NAMES: NAME.pem and NAME-key.pem of one who is called so
certificate() {
  [ -s "$SECRETS/$1.pem" ] && [ -s "$SECRETS/$1-key.pem" ] && return
  rm -f "$SECRETS/$1.pem" "$SECRETS/$1-key.pem"
  {
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
      -keyout "$WORK/$1-key.pem" -out "$WORK/$1.csr" &&
      printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$3" >"$WORK/$1.ext" &&
      openssl x509 -req -days $DAYS -in "$WORK/$1.csr" -extfile "$WORK/$1.ext" \
        -CA "$SECRETS/ca.pem" -CAkey "$SECRETS/ca-key.pem" -CAcreateserial -CAserial "$WORK/serial" \
        -out "$WORK/$1.pem"
  } >"$WORK/said" 2>&1 || die "openssl: $(cat "$WORK/said")"
  keep "$1.pem" "$2" <"$WORK/$1.pem"
  keep "$1-key.pem" "$2" <"$WORK/$1-key.pem"
}

# own_certificate NAME: functions get its fingerprint, so that it needs no authority
own_certificate() {
  [ -s "$SECRETS/$1.pem" ] && [ -s "$SECRETS/$1-key.pem" ] && return
  rm -f "$SECRETS/$1.pem" "$SECRETS/$1-key.pem"
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days $DAYS \
    -subj "/CN=$(hostname)" -keyout "$WORK/key.pem" -out "$WORK/own.pem" 2>"$WORK/said" ||
    die "openssl: $(cat "$WORK/said")"
  keep "$1.pem" 0 <"$WORK/own.pem"
  keep "$1-key.pem" 0 <"$WORK/key.pem"
}

mkdir -p "$SECRETS"
chmod 711 "$SECRETS"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

if [ "${1:-}" = --node ]; then
  [ -s "$SECRETS/cluster-secret" ] || die "copy cluster-secret of the first host to $SECRETS"
fi
random | keep cluster-secret $OURS
keep node-secret 0 <"$SECRETS/cluster-secret"
if [ "${1:-}" = --node ]; then
  own_certificate node
  exit 0
fi

printf admin | keep basic-auth-user $OURS
random | keep basic-auth-password $OURS
random | keep grafana-password $GRAFANA

authority
certificate etcd 0 "DNS:etcd,DNS:localhost,IP:127.0.0.1"
certificate scheduler $OURS "DNS:scheduler-1,DNS:scheduler-2"

# One password, in two files: both are old, or both are new.
[ -s "$SECRETS/nats-password" ] && [ -s "$SECRETS/nats-users" ] ||
  rm -f "$SECRETS/nats-password" "$SECRETS/nats-users"
random | keep nats-password $OURS
printf 'users = [{user: gpufaas, password: "%s"}]\n' "$(cat "$SECRETS/nats-password")" |
  keep nats-users 0
