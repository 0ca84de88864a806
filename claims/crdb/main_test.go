package crdb_test

import (
	"context"
	"testing"

	"reveille/claims/crdb"
	"reveille/internal/dbtest"
)

func TestMain(m *testing.M) {
	dbtest.Main(m, func(ctx context.Context, url string) error {
		_, err := crdb.Migrate(ctx, url, false)
		return err
	})
}
