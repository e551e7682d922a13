//! Circles of modules. Modules that stand beside each other in one module should use each other in one direction only. What lies
//! deeper counts as its ancestor's at that level, and a module's own code may use what is inside it and be used by it. Names that a
//! module re-exports are followed to where they come from.

use std::collections::{BTreeMap, BTreeSet};

use crate::house::{Crate, ModulePath};

/// The modules that are in a circle with modules beside them, each circle as the names of its modules and the module they are in.
pub fn circles(one: &Crate) -> Vec<(ModulePath, Vec<String>)> {
    let mut levels: BTreeMap<ModulePath, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (module, paths) in &one.modules {
        for used in paths {
            let Some(target) = resolve(one, module, &used.segments) else {
                continue;
            };
            let shared = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
            // One contains the other.
            if shared == module.len() || shared == target.len() {
                continue;
            }
            let level = levels.entry(module[..shared].to_vec()).or_default();
            level
                .entry(module[shared].clone())
                .or_default()
                .insert(target[shared].clone());
        }
    }
    let of_level = |(parent, graph): (ModulePath, BTreeMap<String, BTreeSet<String>>)| {
        strongly_connected(&graph)
            .into_iter()
            .map(move |circle| (parent.clone(), circle))
            .collect::<Vec<_>>()
    };
    levels.into_iter().flat_map(of_level).collect()
}

/// The module of this crate that a path leads to; `None` for those of other crates.
fn resolve(one: &Crate, from: &[String], segments: &[String]) -> Option<ModulePath> {
    let mut at = from.to_vec();
    let mut rest = segments;
    match rest.first().map(String::as_str) {
        Some("crate") => {
            at.clear();
            rest = &rest[1..];
        }
        Some("self") => rest = &rest[1..],
        Some("super") => {}
        // A child of this module, or another crate.
        Some(name) if !is_module(one, &child(from, name)) => return None,
        _ => {}
    }
    while rest.first().is_some_and(|first| first == "super") {
        at.pop()?;
        rest = &rest[1..];
    }
    // Re-exports can form a loop; a real chain is short.
    for _ in 0..8 {
        while let Some(next) = rest
            .first()
            .map(|name| child(&at, name))
            .filter(|next| is_module(one, next))
        {
            at = next;
            rest = &rest[1..];
        }
        let Some((target, left)) = rest.first().and_then(|name| re_exported(one, &at, name)) else {
            break;
        };
        at = target;
        rest = if left { rest } else { &rest[1..] };
    }
    Some(at)
}

/// The module in which a name that `module` imports is looked for next, and whether the name itself is still to be found there.
fn re_exported(one: &Crate, module: &[String], name: &str) -> Option<(ModulePath, bool)> {
    let imports = one.modules.get(module)?;
    let import = imports
        .iter()
        .find(|used| used.alias.as_deref() == Some(name) && used.segments.len() > 1)?;
    let parents = &import.segments[..import.segments.len() - 1];
    let mut at = match parents[0].as_str() {
        "crate" => Vec::new(),
        "super" => module[..module.len().checked_sub(1)?].to_vec(),
        "self" => module.to_vec(),
        first if is_module(one, &child(module, first)) => child(module, first),
        _ => return None,
    };
    for name in &parents[1..] {
        at = if name == "super" {
            at[..at.len().checked_sub(1)?].to_vec()
        } else {
            child(&at, name)
        };
    }
    let is_renamed = import.segments.last().is_none_or(|last| last != name);
    is_module(one, &at).then_some((at, !is_renamed))
}

fn is_module(one: &Crate, path: &[String]) -> bool {
    one.modules.contains_key(path)
}

fn child(module: &[String], name: &str) -> ModulePath {
    [module, &[name.to_owned()]].concat()
}

/// The sets of more than one node in which each reaches each.
fn strongly_connected(graph: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<String>> {
    let reach: BTreeMap<&String, BTreeSet<&String>> =
        graph.keys().map(|node| (node, reachable(graph, node))).collect();
    let mut circles: BTreeSet<Vec<String>> = BTreeSet::new();
    for (node, reached) in &reach {
        let together = |other: &&&String| reach.get(**other).is_some_and(|back| back.contains(node));
        let circle: Vec<String> = reached
            .iter()
            .filter(together)
            .map(|other| (*other).clone())
            .collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

fn reachable<'a>(graph: &'a BTreeMap<String, BTreeSet<String>>, from: &'a String) -> BTreeSet<&'a String> {
    let mut reached = BTreeSet::new();
    let mut next = vec![from];
    while let Some(node) = next.pop() {
        let targets = graph.get(node).into_iter().flatten();
        next.extend(targets.filter(|target| reached.insert(*target)));
    }
    reached
}

#[cfg(test)]
#[path = "cycles_test.rs"]
mod tests;
