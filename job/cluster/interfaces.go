package cluster

import (
	"net"
	"strings"

	"ulysses/internal/status"
)

// virtual are the prefixes of interfaces that no other node can reach: bridges of Docker, libvirt,
// Podman and Kubernetes.
var virtual = []string{"docker", "virbr", "br-", "podman", "cni", "flannel", "veth"}

// Interfaces returns the names of this node's network interfaces that are up and have an address.
func Interfaces() (names []string) {
	all, err := net.Interfaces()
	if err != nil {
		return nil
	}
	for _, i := range all {
		if addresses, err := i.Addrs(); err == nil && len(addresses) > 0 && i.Flags&net.FlagUp != 0 {
			names = append(names, i.Name)
		}
	}
	return names
}

// Virtual returns the interfaces of the list that no other node can reach.
func Virtual(names []string) (found []string) {
	for _, n := range names {
		for _, prefix := range virtual {
			if strings.HasPrefix(n, prefix) {
				found = append(found, n)
				break
			}
		}
	}
	return found
}

// interfaceFix is what to do about interfaces that no other node can reach.
const interfaceFix = "set OMPI_MCA_btl_tcp_if_include (and for mpirun OMPI_MCA_oob_tcp_if_include) to the cluster's interface or network, such as 10.0.0.0/16, on all ranks; UCX reads UCX_NET_DEVICES, NCCL reads NCCL_SOCKET_IFNAME"

// InterfaceAdvice returns what may happen with the interfaces of a node, and what to do; "" if
// there is nothing to say, or if Open MPI's variables choose its interfaces.
func InterfaceAdvice(names []string, variable func(name string) (value string, set bool)) (consequence, fix string) {
	found := Virtual(names)
	for _, v := range []string{"OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"} {
		if _, set := variable(v); set {
			return "", ""
		}
	}
	if len(found) == 0 {
		return "", ""
	}
	return "no other node can reach " + strings.Join(found, ", ") + "; Open MPI may try it and wait for ever",
		interfaceFix
}

// interfaces advises on nodes where Open MPI may use an interface that no other node can reach. It
// is for jobs of several nodes.
func interfaces(all []Facts) (found []Finding) {
	nodes := firsts(all)
	if len(nodes) < 2 {
		return nil
	}
	for _, r := range nodes {
		f := &all[r]
		text, fix := InterfaceAdvice(f.Interfaces, func(name string) (string, bool) {
			v, ok := f.Variables[name]
			return v, ok
		})
		if text != "" {
			found = append(found, Finding{status.OK, "network", who(all, r) + ": " + text + "; " + fix})
		}
	}
	return found
}
