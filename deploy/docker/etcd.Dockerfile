# etcd and etcdctl of one release, made of its Go modules: nothing else is in the image.
#
#   docker build -f deploy/docker/etcd.Dockerfile -t gpufaas/etcd:3.5.28 deploy/docker
#
# Another image, such as etcd's own, is named in ETCD_IMAGE (.env).
ARG GO_IMAGE=golang:1.24-bookworm

FROM ${GO_IMAGE} AS build
# docs/etcd.md says why it is not older.
ARG ETCD_VERSION=v3.5.28
WORKDIR /src
# Not `go install`: it refuses modules that replace others, as these do.
RUN go mod init etcd \
 && go get go.etcd.io/etcd/server/v3@${ETCD_VERSION} go.etcd.io/etcd/etcdctl/v3@${ETCD_VERSION} \
 && CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o /out/etcd go.etcd.io/etcd/server/v3 \
 && CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o /out/etcdctl go.etcd.io/etcd/etcdctl/v3

FROM scratch
LABEL org.opencontainers.image.title="etcd" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /out/ /usr/local/bin/
USER 10000:10000
STOPSIGNAL SIGTERM
CMD ["/usr/local/bin/etcd"]
