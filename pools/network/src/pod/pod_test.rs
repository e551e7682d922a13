//! Pods as a CNI plugin creates them: a namespace with one end of a pair, and a host with the other; and a guest, which is a namespace
//! configured by the description.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};

use rustix::thread::UnshareFlags;

use super::*;
use crate::tap::{Failure, enter};
use crate::testbed::{PATIENCE, Wire, talk, within as inside};

const MTU: u32 = 1400;
pub(super) const POD4: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 5);
pub(super) const HOST4: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);
pub(super) const POD6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x88, 0, 0, 0, 0, 0, 5);
pub(super) const HOST6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x88, 0, 0, 0, 0, 0, 1);
/// A neighbour that the plugin has configured in the pod.
const KNOWN: (Ipv4Addr, [u8; 6]) = (Ipv4Addr::new(10, 88, 0, 9), [2, 0, 0, 0, 0, 9]);

/// Runs a test in a namespace that plays the host, if this host allows it.
pub(super) fn on_a_host(test: impl FnOnce() + Send) {
    thaw_test_skip::beside(|| match enter(UnshareFlags::NEWNET) {
        Ok(_) => test(),
        Err(e) => thaw_test_skip::skip(format!("this host cannot {}: {}", e.step.name(), e.error)),
    });
}

fn namespace() -> OwnedFd {
    on_a_thread::<_, Failure>(|| enter(UnshareFlags::NEWNET)).unwrap()
}

/// Joins a pod to the host by another interface.
fn join(pod: &OwnedFd, here: &str, there: &str) -> (u32, u32) {
    let mut route = Socket::route().unwrap();
    link::make_pair(&mut route, here, there, pod.as_fd()).unwrap();
    let up = |route: &mut Socket, name: &str| {
        let index = link::index(route, name).unwrap();
        link::set_mtu(route, index, MTU).unwrap();
        link::set_up(route, index).unwrap();
        index
    };
    let theirs = inside(pod, || up(&mut Socket::route().unwrap(), there));
    (up(&mut route, here), theirs)
}

/// A pod of one interface, with addresses, routes and a neighbour.
pub(super) fn pod() -> OwnedFd {
    let pod = namespace();
    let (here, there) = join(&pod, "pod0", "eth0");
    let mut route = Socket::route().unwrap();
    link::add_address(&mut route, here, HOST4, 16).unwrap();
    link::add_address(&mut route, here, HOST6, 64).unwrap();
    inside(&pod, || {
        let mut route = Socket::route().unwrap();
        link::add_address(&mut route, there, POD4, 16).unwrap();
        link::add_address(&mut route, there, POD6, 64).unwrap();
        link::add_default_route(&mut route, there, HOST4).unwrap();
        link::add_default_route(&mut route, there, HOST6).unwrap();
        link::add_neighbour(&mut route, there, KNOWN.0, KNOWN.1).unwrap();
        let lo = link::index(&mut route, "lo").unwrap();
        link::set_up(&mut route, lo).unwrap();
    });
    pod
}

/// Everything that must be unchanged afterwards. Objects that IPv6 creates by itself are left out.
fn snapshot(pod: &OwnedFd) -> impl PartialEq + std::fmt::Debug + use<> {
    inside(pod, || {
        let mut route = Socket::route().unwrap();
        let mut neighbours = survey::neighbours(&mut route).unwrap();
        neighbours.retain(|n| n.ip == IpAddr::V4(KNOWN.0));
        let mut links = survey::links(&mut route).unwrap();
        for link in &mut links {
            link.flags &= (libc::IFF_UP | libc::IFF_PROMISC | libc::IFF_ALLMULTI) as u32;
        }
        let mut addresses = survey::addresses(&mut route).unwrap();
        addresses.retain(|a| !matches!(a.ip, IpAddr::V6(ip) if ip.is_unicast_link_local()));
        let mut routes = survey::routes(&mut route).unwrap();
        routes.retain(|route| !route.kernel);
        routes.iter_mut().for_each(|route| route.flags = 0);
        let directed = tc::with_ingress(&mut route).unwrap();
        (links, addresses, routes, neighbours, directed)
    })
}

/// A guest that has the tap of an interface and is configured like an agent would configure it.
struct Guest {
    namespace: OwnedFd,
    _wire: Wire,
}

impl Guest {
    fn of(pod: &PodNetwork) -> Guest {
        let config = pod.config().unwrap();
        let (tap, namespace) = on_a_thread::<_, Failure>(|| {
            let namespace = enter(UnshareFlags::NEWNET)?;
            let tap = open_tap("guest", None)?;
            let mut route = Socket::route().unwrap();
            let index = link::index(&mut route, "guest").unwrap();
            link::set_mtu(&mut route, index, u32::from(config.mtu)).unwrap();
            link::set_up_as(&mut route, index, config.mac).unwrap();
            for address in &config.addresses {
                match link::add_address(&mut route, index, address.ip, address.prefix) {
                    // The kernel derives the same address from the same MAC.
                    Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
                    added => added.unwrap(),
                }
            }
            for told in &config.routes {
                assert_eq!(told.prefix, 0);
                link::add_default_route(&mut route, index, told.gateway.unwrap()).unwrap();
            }
            Ok((tap, namespace))
        })
        .unwrap();
        Guest {
            namespace,
            _wire: Wire::between(tap, pod.tap().unwrap()),
        }
    }
}

pub(super) fn attach(pod: &OwnedFd) -> Result<Option<PodNetwork>, Error> {
    PodNetwork::attach(pod.try_clone().unwrap())
}

fn refused(attached: Result<Option<PodNetwork>, Error>) -> PodError {
    match attached.unwrap_err() {
        Error::Pod(why) => why,
        other => panic!("{other}"),
    }
}

#[test]
fn pod_is_attached_and_restored_when_detached() {
    on_a_host(|| {
        let pod = pod();
        let before = snapshot(&pod);
        let attached = attach(&pod).unwrap().unwrap();
        let told = attached.config().unwrap();
        assert_eq!(
            (told.name.as_str(), u32::from(told.mtu), told.arp),
            ("eth0", MTU, true)
        );
        for own in [IpAddr::V4(POD4), IpAddr::V6(POD6)] {
            let address = told.addresses.iter().find(|a| a.ip == own).unwrap();
            assert!(address.on_link, "{address:?}");
        }
        let gateways: Vec<_> = told.routes.iter().filter_map(|route| route.gateway).collect();
        assert_eq!(gateways, [IpAddr::V4(HOST4), IpAddr::V6(HOST6)]);
        let [known] = &told.neighbours[..] else {
            panic!("{:?}", told.neighbours);
        };
        assert_eq!((known.ip, known.mac), (IpAddr::V4(KNOWN.0), KNOWN.1));

        let guest = Guest::of(&attached);
        for host in [IpAddr::V4(HOST4), IpAddr::V6(HOST6)] {
            // Outward, which begins with ARP and neighbour discovery from within …
            let server = TcpListener::bind((host, 80)).unwrap();
            let client = inside(&guest.namespace, || {
                TcpStream::connect_timeout(&SocketAddr::new(host, 80), PATIENCE).unwrap()
            });
            let own = match host {
                IpAddr::V4(_) => IpAddr::V4(POD4),
                IpAddr::V6(_) => IpAddr::V6(POD6),
            };
            assert_eq!(talk(client, &server).ip(), own);
            // … and inward, by the pod's own address.
            let server = inside(&guest.namespace, || TcpListener::bind((own, 8080)).unwrap());
            let client = TcpStream::connect_timeout(&SocketAddr::new(own, 8080), PATIENCE).unwrap();
            assert_eq!(talk(client, &server).ip(), host);
        }
        // The largest datagram, and streams that are segmented to that size.
        let server = UdpSocket::bind((HOST4, 7)).unwrap();
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let full = vec![7; MTU as usize - 28];
        inside(&guest.namespace, || {
            let socket = UdpSocket::bind((POD4, 0)).unwrap();
            socket.send_to(&full, (HOST4, 7)).unwrap();
        });
        let mut said = vec![0; 2000];
        assert_eq!(server.recv(&mut said).unwrap(), full.len());
        let server = TcpListener::bind((HOST4, 81)).unwrap();
        let mut client = inside(&guest.namespace, || TcpStream::connect((HOST4, 81)).unwrap());
        let (mut served, _) = server.accept().unwrap();
        let sent = std::thread::spawn(move || client.write_all(&vec![1; 1 << 20]).unwrap());
        let received = std::io::copy(&mut served, &mut std::io::sink()).unwrap();
        sent.join().unwrap();
        assert_eq!(received, 1 << 20);

        drop(guest);
        drop(attached);
        assert_eq!(snapshot(&pod), before);
        detach(pod.as_fd()).unwrap();
        // The pod's own stack has its interface again.
        let server = TcpListener::bind((HOST4, 82)).unwrap();
        let client = inside(&pod, || {
            TcpStream::connect_timeout(&(HOST4, 82).into(), PATIENCE).unwrap()
        });
        talk(client, &server);
    });
}

#[test]
fn taps_of_a_dead_maker_are_found_and_removed() {
    on_a_host(|| {
        let pod = pod();
        let before = snapshot(&pod);
        let attached = attach(&pod).unwrap().unwrap();
        assert_eq!(refused(attach(&pod)), PodError::InUse);
        // As after kill -9 of the owner and of the VMM: descriptors are closed, and nothing else happens.
        attached.keep();
        assert_ne!(snapshot(&pod), before);
        detach(pod.as_fd()).unwrap();
        assert_eq!(snapshot(&pod), before);
        // Only the owner is killed: the VMM has the tap. The next owner does not wait for the VMM to end.
        let attached = attach(&pod).unwrap().unwrap();
        let vmm = attached.tap().unwrap().try_clone().unwrap();
        attached.keep();
        drop(PodNetwork::adopt(pod.try_clone().unwrap()).unwrap());
        assert_eq!(snapshot(&pod), before);
        drop(vmm);
        // The leftovers of an owner that was killed after its first step.
        inside(&pod, || {
            let mut route = Socket::route().unwrap();
            let eth0 = link::index(&mut route, "eth0").unwrap();
            tc::add_ingress(&mut route, eth0).unwrap();
        });
        drop(attach(&pod).unwrap().unwrap());
        assert_eq!(snapshot(&pod), before);
    });
}

#[test]
fn connections_to_pod_localhost_reach_us_until_the_end() {
    on_a_host(|| {
        let pod = pod();
        let connect = || {
            let to = SocketAddr::from((Ipv4Addr::LOCALHOST, 9000));
            inside(&pod, || TcpStream::connect_timeout(&to, PATIENCE))
        };
        let made = attach(&pod).unwrap().unwrap();
        made.keep();
        // Another thawd's.
        let mut adopted = PodNetwork::adopt(pod.try_clone().unwrap()).unwrap();
        let listener = adopted.take_loopback().unwrap();
        let client = connect().unwrap();
        let (served, from) = listener.accept().unwrap();
        assert_eq!(from, client.local_addr().unwrap());
        assert_eq!(original_port(&served).unwrap(), 9000);
        drop(adopted);
        assert!(connect().is_err(), "nobody listens");
        let server = inside(&pod, || TcpListener::bind((Ipv4Addr::LOCALHOST, 9000)).unwrap());
        let client = connect().unwrap();
        assert_eq!(server.accept().unwrap().1, client.local_addr().unwrap());
    });
}

#[test]
fn pod_of_several_interfaces_is_refused_by_name() {
    on_a_host(|| {
        let pod = pod();
        let mut route = Socket::route().unwrap();
        link::make_pair(&mut route, "pod2", "net2", pod.as_fd()).unwrap();
        drop(attach(&pod).unwrap().unwrap());
        join(&pod, "pod1", "net1");
        let before = snapshot(&pod);
        let why = refused(attach(&pod)).to_string();
        assert!(
            why.contains("2 network interfaces") && why.contains("eth0") && why.contains("net1"),
            "{why}"
        );
        assert_eq!(snapshot(&pod), before);
    });
}

#[test]
fn host_network_and_directed_interfaces_are_refused() {
    on_a_host(|| {
        let own = open(Path::new("/proc/thread-self/ns/net")).unwrap();
        assert_eq!(refused(PodNetwork::attach(own)), PodError::HostNetwork);
        // The real host's namespace, if we may see it.
        if let Ok(real) = open(Path::new("/proc/1/ns/net")) {
            let why = detach(real.as_fd()).unwrap_err().to_string();
            assert_eq!(why, PodError::HostNetwork.to_string());
        }
        let other = open(Path::new("/proc/self/ns/uts")).unwrap();
        let why = PodNetwork::attach(other).unwrap_err().to_string();
        assert!(why.contains("enter a network namespace"), "{why}");
        open(Path::new("/run/netns/there is none")).unwrap_err();

        assert!(PodNetwork::attach(namespace()).unwrap().is_none());

        let pod = pod();
        inside(&pod, || {
            let mut route = Socket::route().unwrap();
            let eth0 = link::index(&mut route, "eth0").unwrap();
            tc::add_ingress(&mut route, eth0).unwrap();
            tc::redirect_as(b"theirs", &mut route, eth0, 1).unwrap();
        });
        let before = snapshot(&pod);
        let interface = "eth0".to_owned();
        assert_eq!(refused(attach(&pod)), PodError::Directed { interface });
        detach(pod.as_fd()).unwrap();
        assert_eq!(snapshot(&pod), before);
    });
}
