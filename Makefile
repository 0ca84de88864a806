# Everything a developer types. Variables: ARGS of `make run`; PKG and RUN of `make test`.
.DEFAULT_GOAL := help
.PHONY: help run build test e2e spec torture mutants check clean

PKG ?= ./...
ARGS ?=
RUN ?=
TOOL := go tool -modfile=tools/go.mod

help: ## this list
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

run: ## start everything on this machine: database, NATS, workers, scanner (ARGS="--workers 4")
	@scripts/ensure-database.sh
	@mkdir -p bin
	go build -o bin/reveille ./cmd/reveille
	bin/reveille dev $(ARGS)

build: ## build bin/worker, bin/scanner and bin/reveille
	@mkdir -p bin
	go build -o bin/ ./cmd/worker ./cmd/scanner ./cmd/reveille

test: ## run the tests, with the race detector and a database (PKG=./claims/... RUN=TestI9)
	@scripts/ensure-database.sh
	go run ./internal/testenv -- go test -race -timeout 15m $(if $(RUN),-run '$(RUN)') $(PKG)

e2e: ## run the whole system from outside, as its users do
	@scripts/ensure-database.sh
	scripts/e2e.sh
	scripts/e2e-cluster.sh

spec: ## explore the model of the claim protocol in its large bounds (minutes, 4 GiB)
	RV_TEST_SPEC=large go test -count=1 -timeout 1h -v -run TestLarge ./spec

torture: ## break it on purpose, and prove that nothing broke (TIME=1h SEED=7 NATS=3 RACE=1 MUTANT=fence)
	@scripts/ensure-database.sh
	go run ./internal/torture $(if $(SEED),--seed $(SEED)) $(if $(TIME),--time $(TIME)) $(if $(NATS),--nats $(NATS)) $(if $(RACE),--race) $(if $(MUTANT),--mutant $(MUTANT))

mutants: ## break one rule after the other, and see that torture finds each; 45 minutes at most
	@scripts/ensure-database.sh
	go test -count=1 -v -tags mutants -timeout 60m -run TestMutantsAreFound ./internal/torture

check: ## formatting, modules, vet, staticcheck, import directions
	@unformatted=$$($(TOOL) gofumpt -l .) || exit 1; \
	if [ -n "$$unformatted" ]; then \
		echo "not formatted, type: $(TOOL) gofumpt -w" $$unformatted >&2; exit 1; \
	fi
	go mod tidy -diff
	go vet ./...
	$(TOOL) staticcheck ./...
	go test -count=1 ./internal/layout # git is asked for the files, so no cached result holds

clean: ## remove what was built; a development database in .reveille stays
	rm -rf bin
