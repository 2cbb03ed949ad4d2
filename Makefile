# `make` lists what there is.
GO      ?= go
BIN     := bin
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.version=$(VERSION)

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.0

.DEFAULT_GOAL := help
.PHONY: help build lib demo build-rdma test test-rdma test-pmem test-rdma-2 test-iwarp race mutants chaos fuzz bench dist generate lint tools clean

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build-rdma: ## bin/quarry with verbs; needs gcc, libibverbs-dev, librdmacm-dev; runs with libibverbs1, librdmacm1
	CGO_ENABLED=1 $(GO) build -trimpath -tags verbs -ldflags '$(LDFLAGS)' -o $(BIN)/quarry ./cmd/quarry

lib: ## bin/lib: libquarry.so.1, the client for C and languages that call C, with quarry.h; librpmem.so.1, pools for programs on libpmemobj
	GO=$(GO) sh cmd/libquarry/build.sh $(BIN)/lib $(VERSION)
	GO=$(GO) sh cmd/librpmem/build.sh $(BIN)/lib

build: ## bin/quarry, one static binary
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/quarry ./cmd/quarry

demo: build ## a cluster of separate processes keeps a real source tree and gives every byte back
	$(BIN)/quarry demo

test: tools ## everything: builds, gofmt, vet, all tests, deliberate bugs, Soft-RoCE, race detector
	GO=$(GO) $(GO) run -trimpath -tags netgo,osusergo ./verify/testrun $(TESTRUN)

test-rdma: ## everything on real RDMA: this host's adapter, or Soft-RoCE in a virtual machine
	sh verify/rxevm/test-rdma.sh

test-pmem: ## persistent memory on emulated NVDIMMs, in a virtual machine that is killed KILLS times (2) under a durable load
	sh verify/rxevm/test-rdma.sh pmem
	$(GO) test -count=1 -v -timeout 60m ./verify/rxevm/killed -args -kills $(or $(KILLS),2)
	$(GO) test -count=1 -v -timeout 60m ./verify/rxevm/shared

test-rdma-2: ## verbs between two virtual machines
	sh verify/rxevm/test-rdma.sh two

test-iwarp: ## the contract of verbs over Soft-iWARP, which is built from the kernel's source first
	sh verify/rxevm/test-rdma.sh iwarp

mutants: ## every deliberate bug of verify/mutants is found, also those that take long
	$(GO) test -v -count=1 -timeout 60m -run 'TestMutants|TestHazards' ./verify/mutants -args -all

race: ## every test under the race detector
	$(GO) test -race -timeout 30m ./...

chaos: build ## kill, stop and cut off processes of real clusters under load, for DURATION (5m)
	CGO_ENABLED=0 $(GO) build -o $(BIN)/chaos ./verify/chaos/cmd/chaos
	$(BIN)/chaos -binary $(BIN)/quarry -duration $(or $(DURATION),5m) $(CHAOS)

fuzz: ## every fuzz target for FUZZTIME (10s); the corpus is kept below bin/fuzz
	GO=$(GO) sh verify/fuzz/run.sh

bench: build tools ## figures of this machine beside memory, TCP and Redis
	$(BIN)/quarry bench --self

dist: ## dist/: archives for each platform, chart, checksums, list of parts
	$(GO) run ./deploy/dist -version $(VERSION) -out dist

generate: ## generated code from its sources
	$(GO) generate ./...

lint: ## gofmt, vet, staticcheck and the rules of verify/lint
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); exit 1; }
	$(GO) vet ./...
	@test -x $(BIN)/staticcheck || GOBIN=$(CURDIR)/$(BIN) $(GO) install $(STATICCHECK)
	$(BIN)/staticcheck ./...
	$(GO) test -count=1 ./verify/lint

tools: ## what tests and benchmarks can use beside Go
	@sh .ci/tools

clean: ## remove what was built
	rm -rf $(BIN) dist
