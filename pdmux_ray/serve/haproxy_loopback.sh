#!/bin/sh
# Stands in for the HAProxy binary: closes two doors in the configuration that Serve has just written, then becomes HAProxy.
# Serve binds HAProxy's statistics page and its metrics to every interface and has no setting for it.
# From the environment (pdmux_ray/serve/modes.py): PDMUX_HAPROXY_BINARY and the two ports.
set -eu
ports="$RAY_SERVE_HAPROXY_STATS_PORT|$RAY_SERVE_HAPROXY_METRICS_PORT"
previous=
for argument in "$@"; do
    if [ "$previous" = -f ]; then
        sed -i -E "s/^( *bind) \*?:($ports)\$/\1 127.0.0.1:\2/" "$argument"
    fi
    previous=$argument
done
exec "$PDMUX_HAPROXY_BINARY" "$@"
