#!/bin/sh
# Stands in for the HAProxy binary: mends the configuration that Serve has just written where Serve has no setting, then
# becomes HAProxy.
# - Serve binds HAProxy's statistics page and its metrics to every interface.
# - A request's head may take an hour. (How long a body may take is the gateway's to say.)
# - Serve answers 500 to a request id that is not ASCII; without one it makes its own.
# From the environment (pdmux_ray/serve/modes.py): PDMUX_HAPROXY_BINARY and the two ports.
set -eu
ports="$RAY_SERVE_HAPROXY_STATS_PORT|$RAY_SERVE_HAPROXY_METRICS_PORT"
previous=
for argument in "$@"; do
    if [ "$previous" = -f ]; then
        sed -i -E \
            -e "s/^( *bind) \*?:($ports)\$/\1 127.0.0.1:\2/" \
            -e '/^defaults$/,/^frontend /s/^( *)timeout client .*$/&\n\1timeout http-request 30s/' \
            -e '/^frontend http_frontend$/a\    http-request del-header x-request-id if { req.fhdr(x-request-id) -m reg [^!-~]|.{129} }' \
            "$argument"
    fi
    previous=$argument
done
exec "$PDMUX_HAPROXY_BINARY" "$@"
