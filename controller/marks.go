package controller

import (
	"context"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// marksPrefix precedes the names that list marks of slabs whose objects are lost (client.BadPrefix).
const marksPrefix = "bad/"

// Marks counts the marks that are listed among the names of all tenants: one question for a hundred of them.
func (c *Controller) Marks(ctx context.Context) (n int64, err error) {
	list, err := c.tenantList(ctx, false)
	if err != nil {
		return 0, err
	}
	asks := []clientv3.Op{c.marksOf(0)}
	for _, t := range list {
		if t.Id != 0 {
			asks = append(asks, c.marksOf(t.Id))
		}
	}
	for part := range slices.Chunk(asks, maxNamesOnce) {
		ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
		res, err := c.cfg.Etcd.Txn(ctx).Then(part...).Commit()
		cancel()
		if err != nil {
			return 0, etcdError(err)
		}
		for _, r := range res.Responses {
			n += r.GetResponseRange().Count
		}
	}
	return n, nil
}

// marksOf asks for the number of marks of a tenant.
func (c *Controller) marksOf(tenant uint32) clientv3.Op {
	return clientv3.OpGet(c.nameKey(tenant, marksPrefix), clientv3.WithPrefix(), clientv3.WithCountOnly())
}
