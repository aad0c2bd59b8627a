module faascli

go 1.21

require github.com/openfaas/faas-cli v0.0.0-20211012083206-08e3e965c831
