# The document that ./sbom prints, of cargo's metadata and lists of checksums and packages.
def words: split("\n") | map(select(. != "") | split(" "));
def licences: if . == null then {} else {licenses: [{expression: (. | gsub("/"; " OR "))}]} end;

($crates[0].packages | INDEX(.id)) as $of
| ($crates[0].resolve.nodes | INDEX(.id)) as $nodes
| ($checksums | words | INDEX("\(.[0]) \(.[1])")) as $sums
# What is linked: not what builds or tests need.
| def linked: [$nodes[.].deps[] | select(any(.dep_kinds[]; .kind == null)) | .pkg];
  def purl: $of[.] | "pkg:cargo/\(.name)@\(.version)";
  [$crates[0].packages[] | select(.source == null)
    | select(any(.targets[]; (.kind | index("bin")) and (.name | IN("thaw", "thawd", "thaw-vmm", "thaw-share", "containerd-shim-thaw-v2", "thaw-agent"))))
    | .id] as $roots
| {seen: $roots, next: $roots}
| until(.next == []; (([.next[] | linked[]] | unique) - .seen) as $new | {seen: (.seen + $new), next: $new})
| .seen | sort as $all
| ($packages | words) as $debian
| {
  bomFormat: "CycloneDX", specVersion: "1.5", version: 1,
  metadata: {
    timestamp: $timestamp,
    component: {type: "application", name: "thaw", version: $version, "bom-ref": "thaw", licenses: [{license: {id: "Apache-2.0"}}]}
  },
  components: (
    [$all[] | . as $id | $of[.] | {type: "library", name, version, purl: ($id | purl), "bom-ref": ($id | purl)}
      + (.license | licences)
      + ($sums["\(.name) \(.version)"] as $sum | if $sum then {hashes: [{alg: "SHA-256", content: $sum[2]}]} else {} end)]
    + [{type: "library", name: "rust-std", version: $rust, "bom-ref": "rust-std", licenses: [{expression: "MIT OR Apache-2.0"}]},
       {type: "library", name: "glibc", version: $libc, "bom-ref": "glibc", licenses: [{license: {id: "LGPL-2.1-or-later"}}]},
       {type: "operating-system", name: "linux", version: $kernel, "bom-ref": "linux", description: "The guest's kernel",
        licenses: [{license: {id: "GPL-2.0-only"}}], hashes: [{alg: "SHA-256", content: $kernel_hash}]}]
    + [$debian[] | "pkg:deb/debian/\(.[0])@\(.[1] | @uri)?arch=\(.[2])&distro=bookworm" as $purl
       | {type: "library", name: .[0], version: .[1], purl: $purl, "bom-ref": $purl, description: "In the node image"}]
  ),
  dependencies: (
    [{ref: "thaw", dependsOn: ([$roots[] | purl] + ["linux", "glibc", "rust-std"] | sort)}]
    + [$all[] | {ref: purl, dependsOn: ([linked[] | purl] | unique)}]
  )
}
