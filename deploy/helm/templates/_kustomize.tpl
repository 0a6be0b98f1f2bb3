{{/*
Renders deploy/kubernetes as `kubectl kustomize` does, so that there is one set of files. Supported:
resources, components, JSON patches (RFC 6902), configMapGenerator with files, images, namespace.
*/}}

{{/*
Adds the manifests of the kustomization in .folder to .state and applies its patches and images.
An overlay also gets the .components and .images of the values.
*/}}
{{- define "baton.build" }}
{{- $tree := include "baton.text" (dict "files" .files "path" (printf "%s/kustomization.yaml" .folder)) | fromYaml }}
{{- range omit $tree "apiVersion" "kind" "namespace" "resources" "components" "patches" "configMapGenerator" "images" | keys }}
  {{- fail (printf "%s: %s is not known here" $.folder .) }}
{{- end }}
{{- range $tree.resources }}
  {{- include "baton.add" (dict "files" $.files "path" (clean (printf "%s/%s" $.folder .)) "state" $.state) }}
{{- end }}
{{- range $tree.configMapGenerator }}
  {{- $data := dict }}
  {{- range .files }}{{ $_ := set $data . ($.files.Get (printf "%s/%s" $.folder .)) }}{{ end }}
  {{- $map := dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" (dict "name" .name) "data" $data }}
  {{- $_ := set $.state "manifests" (append $.state.manifests $map) }}
{{- end }}
{{- range $tree.components }}
  {{- include "baton.build" (dict "files" $.files "folder" (clean (printf "%s/%s" $.folder .)) "state" $.state) }}
{{- end }}
{{- range .components }}
  {{- include "baton.build" (dict "files" $.files "folder" (printf "kubernetes/components/%s" .) "state" $.state) }}
{{- end }}
{{- range $tree.patches }}
  {{- $text := .patch | default ($.files.Get (printf "%s/%s" $.folder .path)) }}
  {{- include "baton.patch" (dict "state" $.state "target" .target "operations" (fromYamlArray $text)) }}
{{- end }}
{{- range $name, $new := .images }}
  {{- include "baton.image" (dict "state" $.state "name" $name "new" $new) }}
{{- end }}
{{- range $tree.images }}
  {{- include "baton.image" (dict "state" $.state "name" .name "new" (printf "%s:%v" .newName .newTag)) }}
{{- end }}
{{- range .state.manifests }}
  {{- if and $tree.namespace (ne .kind "Namespace") }}
    {{- $_ := set .metadata "namespace" $tree.namespace }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The text of the file at .path, which must be there. */}}
{{- define "baton.text" -}}
{{- .files.Get .path | required (printf "%s is not in the chart" .path) }}
{{- end }}

{{/* Adds the manifests at .path, a file or a folder, to .state. */}}
{{- define "baton.add" }}
{{- if hasSuffix ".yaml" .path }}
  {{- range include "baton.text" . | splitList "\n---\n" }}
    {{- with printf "%s\n" . | fromYaml }}
      {{- if .Error }}{{ fail (printf "%s: %s" $.path .Error) }}{{ end }}
      {{- $_ := set $.state "manifests" (append $.state.manifests .) }}
    {{- end }}
  {{- end }}
{{- else }}
  {{- include "baton.build" (dict "files" .files "folder" .path "state" .state) }}
{{- end }}
{{- end }}

{{/* Applies .operations to the manifests of .state that .target names. */}}
{{- define "baton.patch" }}
{{- $manifests := list }}
{{- $found := false }}
{{- range .state.manifests }}
  {{- $manifest := . }}
  {{- if and (eq .kind $.target.kind) (eq .metadata.name $.target.name) }}
    {{- $found = true }}
    {{- range $.operations }}
      {{- $path := splitList "/" .path | rest }}
      {{- $manifest = (include "baton.patched" (dict "place" $manifest "path" $path "operation" .) | fromJson).place }}
    {{- end }}
  {{- end }}
  {{- $manifests = append $manifests $manifest }}
{{- end }}
{{- if not $found }}{{ fail (printf "nothing to patch is %v" .target) }}{{ end }}
{{- $_ := set .state "manifests" $manifests }}
{{- end }}

{{/* .place after .operation at .path, as JSON: {"place": …}. */}}
{{- define "baton.patched" -}}
{{- $part := first .path | replace "~1" "/" | replace "~0" "~" }}
{{- $rest := rest .path }}
{{- $op := .operation.op }}
{{- $place := .place }}
{{- if kindIs "slice" .place }}
  {{- $place = list }}
  {{- $index := eq $part "-" | ternary (len .place) (atoi $part) }}
  {{- range $number, $item := .place }}
    {{- if ne $number $index }}
      {{- $place = append $place $item }}
    {{- else if $rest }}
      {{- $place = append $place (include "baton.patched" (dict "place" $item "path" $rest "operation" $.operation) | fromJson).place }}
    {{- else if eq $op "add" }}
      {{- $place = concat $place (list $.operation.value $item) }}
    {{- else if eq $op "replace" }}
      {{- $place = append $place $.operation.value }}
    {{- end }}
  {{- end }}
  {{- if and (eq $op "add") (not $rest) (eq $index (len .place)) }}
    {{- $place = append $place .operation.value }}
  {{- else if ge $index (len .place) }}
    {{- fail (printf "%s: there is no item %d" .operation.path $index) }}
  {{- end }}
{{- else if and (not (hasKey .place $part)) (or $rest (ne $op "add")) }}
  {{- fail (printf "%s is not there to be patched" .operation.path) }}
{{- else if $rest }}
  {{- $inner := (include "baton.patched" (dict "place" (get .place $part) "path" $rest "operation" .operation) | fromJson).place }}
  {{- $place = set .place $part $inner }}
{{- else if eq $op "remove" }}
  {{- $place = unset .place $part }}
{{- else }}
  {{- $place = set .place $part .operation.value }}
{{- end }}
{{- dict "place" $place | toJson }}
{{- end }}

{{/* Gives every container whose image is .name the image .new. */}}
{{- define "baton.image" }}
{{- range .state.manifests }}
  {{- $pods := list }}
  {{- if has .kind (list "Deployment" "StatefulSet") }}
    {{- $pods = list .spec.template }}
  {{- else if eq .kind "RayCluster" }}
    {{- $pods = list .spec.headGroupSpec.template }}
    {{- range .spec.workerGroupSpecs }}{{ $pods = append $pods .template }}{{ end }}
  {{- end }}
  {{- range $pods }}
    {{- range concat (.spec.initContainers | default list) .spec.containers }}
      {{- if eq .image $.name }}{{ $_ := set . "image" $.new }}{{ end }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}
