// A module of our own, so that the version of faas-cli that the tests run is pinned here: the
// import keeps the requirement, and `go build github.com/openfaas/faas-cli` makes the program.
package main

import _ "github.com/openfaas/faas-cli/version"

func main() {}
