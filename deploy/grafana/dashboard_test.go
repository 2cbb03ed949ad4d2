package grafana

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the dashboards anew")

func TestDashboardsAreCurrent(t *testing.T) {
	uids := map[string]bool{}
	for _, d := range Dashboards {
		b, err := d.JSON()
		require.NoError(t, err)
		file := filepath.Join("dashboards", d.UID+".json")
		if *update {
			require.NoError(t, os.WriteFile(file, b, 0o644))
		}
		kept, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, string(kept), string(b), "%s: go generate ./deploy/grafana", file)
		require.True(t, json.Valid(b))
		require.False(t, uids[d.UID], d.UID)
		uids[d.UID] = true
	}
	files, err := filepath.Glob("dashboards/*.json")
	require.NoError(t, err)
	require.Len(t, files, len(Dashboards), "no file without a dashboard")
}

// Panels of a row lie side by side and never over each other.
func TestPanelsDoNotOverlap(t *testing.T) {
	type pos struct{ X, Y, W, H int }
	for _, d := range Dashboards {
		b, err := d.JSON()
		require.NoError(t, err)
		var parsed struct {
			Panels []struct {
				Title   string
				GridPos pos
			}
		}
		require.NoError(t, json.Unmarshal(b, &parsed))
		taken := map[[2]int]string{}
		for _, p := range parsed.Panels {
			require.LessOrEqual(t, p.GridPos.X+p.GridPos.W, gridWidth, p.Title)
			for x := range p.GridPos.W {
				for y := range p.GridPos.H {
					at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
					require.Empty(t, taken[at], "%s: %s", d.UID, p.Title)
					taken[at] = p.Title
				}
			}
		}
	}
}

func TestPanelsSayWhatTheyShow(t *testing.T) {
	for _, d := range Dashboards {
		for _, r := range d.Rows {
			require.NotEmpty(t, r.Title)
			for _, p := range r.Panels {
				require.NotEmpty(t, p.Title)
				require.NotEmpty(t, p.Unit, p.Title)
				require.NotEmpty(t, p.Queries, p.Title)
				for _, q := range p.Parsed() {
					require.NotEmpty(t, q.Expr, "%s: want legend, colon, space, query", p.Title)
					own := strings.Contains(q.Expr, "quarry_") && !strings.Contains(q.Expr, "quarry_node_adapter_")
					require.Equal(t, p.Foreign, !own, p.Title)
				}
			}
		}
	}
}
